"""What drivers and libraries say about devices: identity, counters, samples, errors, NCCL."""
