#!/bin/bash
# Prolog of Slurm: check the GPUs of this node in seconds before each job, as root. In slurm.conf:
#   Prolog=/etc/slurm/health-prolog.sh
#   PrologFlags=Alloc
#   PrologEpilogTimeout=90     (or PrologTimeout=90, where Slurm has it)
# Slurm drains the node and queues the job again if this script ends with anything but 0. So it ends
# with 1 only if the report of this node says `drain`, and with 0 after any other end: a broken
# installation (Python itself ends with 1 if raybench cannot be imported), a mistake in this file, a
# busy node, or a check that takes too long.
# No scontrol in here: slurmctld may wait for this prolog.
set -u
# Slurm sets no PATH for a prolog.
export PATH=${RAYBENCH_BIN:-/opt/raybench/bin}:/usr/sbin:/usr/bin:/sbin:/bin
# Below the limit of slurm.conf, because Slurm drains the node at its own limit.
limit_s=${RAYBENCH_LIMIT_S:-60}
# Where `raybench health --collect` finds the reports; root alone may write there.
reports=${RAYBENCH_REPORTS:-/var/spool/raybench}
# cuda: a node that has lost its driver is not tested. auto would test and pass its CPU workers.
device=${RAYBENCH_DEVICE:-auto}
# Of node_exporter: a file name that ends in .prom; empty: no metrics.
textfile=${RAYBENCH_TEXTFILE:-}

own=$(mktemp -d) || exit 0
trap 'rm -rf "$own"' EXIT
# KILL 5 s after TERM: a process that hangs in the driver may ignore TERM.
timeout --kill-after=5 "$limit_s" raybench health --quick --exit-code slurm --report "$own" \
  --device "$device" ${textfile:+--textfile "$textfile"} > "$own/said" 2>&1
code=$?
report=$(find "$own" -name '*.json' -print -quit)
if [ -n "$report" ] && mkdir -p "$reports"; then
  name=${report##*/}
  cp -p "$report" "$reports/.$name.$$" && mv "$reports/.$name.$$" "$reports/$name"
fi
if [ $code = 1 ] && [ -n "$report" ] && grep -q '"state": "drain"' "$report"; then
  logger -t raybench -f "$own/said" 2> /dev/null
  cat "$own/said" >&2
  exit 1
fi
if [ $code != 0 ] || [ -z "$report" ]; then
  echo "raybench health ended with $code: this node was not checked and is not drained" >> "$own/said"
  logger -t raybench -f "$own/said" 2> /dev/null
  cat "$own/said" >&2
fi
exit 0
