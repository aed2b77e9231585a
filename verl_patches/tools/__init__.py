"""What is done beside a run: its data before, the trained model afterwards."""
