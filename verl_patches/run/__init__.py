"""What a run is: composed configuration, environment, ports, folder and record, and the rules that it must keep."""
