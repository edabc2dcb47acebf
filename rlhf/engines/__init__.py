"""What trains: module, reference, optimizer and schedule behind one interface, per distributed backend."""
