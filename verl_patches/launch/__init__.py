"""Take a configuration to a supervised run: driver process, Ray, smoke runs; doctor, watch and jobs of a cluster."""
