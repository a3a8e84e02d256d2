"""Workers as plain processes, without Ray: of this host, or of those of an srun or a torchrun."""
