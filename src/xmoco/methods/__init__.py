"""Methods: one file each. Who trains them knows only ``Task`` (task.py) and ``Method``."""

from xmoco.config import Config
from xmoco.config.methods import (
    AlignUniformConfig,
    BarlowTwinsConfig,
    BYOLConfig,
    CO2Config,
    InstDiscConfig,
    JCLConfig,
    MNNConfig,
    MoCoOneWayConfig,
    MoCoV2PlusConfig,
    MSFConfig,
    ReSSLConfig,
    SCEConfig,
    SimCLRConfig,
    SimSiamConfig,
    SupervisedConfig,
    SwAVConfig,
    UOTAConfig,
    VICRegConfig,
    XMoCoConfig,
)
from xmoco.config.section import Section
from xmoco.methods.alignuniform import AlignUniform
from xmoco.methods.barlowtwins import BarlowTwins
from xmoco.methods.base import Method
from xmoco.methods.byol import BYOL
from xmoco.methods.co2 import CO2
from xmoco.methods.instdisc import InstDisc
from xmoco.methods.jcl import JCL
from xmoco.methods.mnn import MNN
from xmoco.methods.moco import MoCo
from xmoco.methods.mocov2plus import MoCoV2Plus
from xmoco.methods.msf import MSF
from xmoco.methods.ressl import ReSSL
from xmoco.methods.sce import SCE
from xmoco.methods.simclr import SimCLR
from xmoco.methods.simsiam import SimSiam
from xmoco.methods.supervised import Supervised
from xmoco.methods.swav import SwAV
from xmoco.methods.uota import UOTA
from xmoco.methods.vicreg import VICReg
from xmoco.methods.xmoco import XMoCo

__all__ = ["Method", "build_method", "method_class"]

METHODS: dict[type[Section], type[Method]] = {
    XMoCoConfig: XMoCo,
    MoCoV2PlusConfig: MoCoV2Plus,
    SimCLRConfig: SimCLR,
    BYOLConfig: BYOL,
    SwAVConfig: SwAV,
    ReSSLConfig: ReSSL,
    SCEConfig: SCE,
    CO2Config: CO2,
    AlignUniformConfig: AlignUniform,
    JCLConfig: JCL,
    UOTAConfig: UOTA,
    SimSiamConfig: SimSiam,
    BarlowTwinsConfig: BarlowTwins,
    VICRegConfig: VICReg,
    MSFConfig: MSF,
    MNNConfig: MNN,
    SupervisedConfig: Supervised,
    InstDiscConfig: InstDisc,
    MoCoOneWayConfig: MoCo,
}


def method_class(settings: Section) -> type[Method]:
    return METHODS[type(settings)]


def build_method(config: Config) -> Method:
    return method_class(config.method)(config)
