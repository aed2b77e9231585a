"""Convert files of many schemas to the parquet files that a run reads (`data build`, docs/data.md)."""
