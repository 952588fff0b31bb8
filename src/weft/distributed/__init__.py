"""The processes of a run: launch, store, heartbeats, transport, and the loop of a rank."""
