#!/bin/bash
# Epilog of Slurm: the check of the prolog after each job, so that a node with a bad GPU is drained
# before the next job is sent to it. In slurm.conf:
#   Epilog=/etc/slurm/health-epilog.sh
# With it a prolog may be spared. Processes that the job left behind make the node busy, which ends
# with 0: let a script that ends them run first.
prolog=$(dirname "$(readlink -f "$0")")/health-prolog.sh
# Slurm drains a node also if the epilog ends with 127.
[ -r "$prolog" ] || exit 0
exec /bin/bash "$prolog"
