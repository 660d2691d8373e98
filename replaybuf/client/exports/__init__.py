"""Exports: groups, rollouts and ledger of a run as a folder of Parquet files, and a new run from such a folder."""
