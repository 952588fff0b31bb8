"""Events of any size in little memory: files of lines that grow, and what they come to."""
