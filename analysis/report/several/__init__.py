"""Put several runs side by side."""
