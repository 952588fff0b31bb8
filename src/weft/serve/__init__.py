"""What a person sees: documents about runs, the server and the page that show them live, and the static report."""
