"""What the stages of a run did and when: written, read back, analysed."""
