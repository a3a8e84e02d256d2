"""Which device, link or node is bad: what is read, what is said of it, what to do."""
