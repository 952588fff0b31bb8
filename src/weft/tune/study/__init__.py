"""Ask and tell: which values a trial gets, whether it is pruned, and what is stored."""
