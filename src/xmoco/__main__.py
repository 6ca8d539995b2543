"""``python -m xmoco`` is ``xmoco``."""

from xmoco.cli import main

if __name__ == "__main__":
    main()
