"""What crosses a process boundary: groups, frames, batch bodies, run configuration, ledger records, HTTP contract."""
