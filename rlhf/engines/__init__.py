"""Training engines: module, reference, optimizer and schedule behind one interface, one per backend."""
