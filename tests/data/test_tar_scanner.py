"""What a shard's scanner makes of a tar archive."""

import io
import tarfile

from xmoco.data.tar_scanner import scan_tar


def test_labels_are_short_behind_links_too() -> None:
    """A label is read while the shard is scanned: one that is another name for a file of any
    length would be read whole."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in (
            ("1.jpg", b"an image"),
            ("1.cls", b"cat"),
            ("2.jpg", b"another"),
            ("2.bin", b"x" * 2 * tarfile.BLOCKSIZE),
            ("3.jpg", b"a third"),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, linked in (("2.cls", "2.bin"), ("3.cls", "1.cls")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.LNKTYPE, linked
            archive.addfile(link)
    whole, longest = made.getvalue(), 0

    def read(offset: int, count: int) -> bytes:
        nonlocal longest
        longest = max(longest, count)
        return whole[offset : offset + count]

    found = scan_tar(read, len(whole))
    assert longest == tarfile.BLOCKSIZE  # of headers
    assert found.names == b"1.jpg2.jpg3.jpg"
