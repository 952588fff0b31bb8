"""What is true of any nn.Module."""
