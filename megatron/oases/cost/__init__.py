"""What operations cost, and how long an iteration of them takes, without running any."""
