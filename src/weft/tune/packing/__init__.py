"""Which trials run where: values and pure functions, no clock, no process."""
