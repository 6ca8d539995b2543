"""Detectors on a backbone: images with boxes and masks in, a tuned detector and its AP out.

``sources`` opens what COCO, PASCAL VOC and YOLO write; ``models`` puts torchvision's detectors on a
backbone; ``task`` and ``losses`` train them in the loop that everything here is trained in;
``metrics`` judges them as COCO and VOC do; ``evaluation`` is the command.
"""
