"""Data in: files of many schemas become the parquet files that a run reads (`data build`, docs/data.md)."""
