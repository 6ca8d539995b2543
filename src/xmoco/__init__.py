"""xmoco."""
