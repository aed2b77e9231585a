"""What a worker, the controller and a node say of themselves while they run; no torch."""
