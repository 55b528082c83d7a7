"""What a run will do, told before any process starts and without torch."""
