"""What tests share: devices, runs and programs that are compared, jobs, processes, files."""
