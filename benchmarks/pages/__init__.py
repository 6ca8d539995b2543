"""What stands in README.md and docs/ between markers, drawn from records and recipes."""
