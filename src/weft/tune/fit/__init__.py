"""What a trial takes of a device, and how it is made to fit one."""
