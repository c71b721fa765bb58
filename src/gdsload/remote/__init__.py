"""Remote files: object stores, peers, and several sources of one file."""
