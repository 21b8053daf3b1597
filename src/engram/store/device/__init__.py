"""What stores need of an accelerator: rows that lie on one, and rows of the host that one reads."""
