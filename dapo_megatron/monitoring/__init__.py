"""What a run tells about itself: console, metrics.jsonl, trackers, memory and the summary. Loads no torch."""
