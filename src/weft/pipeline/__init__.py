"""How stages share the work: scheduler, workload, simulator, a stage and its messages. No process, no clock."""
