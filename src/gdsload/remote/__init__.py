"""Files that are not on this machine: object stores, peers, and several sources of one file."""
