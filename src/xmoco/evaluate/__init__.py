"""Evaluation: how strong is a backbone? Every number leaves as a record that names its protocol."""
