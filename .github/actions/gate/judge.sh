#!/usr/bin/env bash
# Fail where FAIL_ON says so. VERDICT: slower, faster, same, undecided or not_measured. EXIT_CODE: of
# `raybench ab`.
set -euo pipefail

# 2: a wrong option, or a revision that a shallow clone lacks; 4: a bug; 126, 127: no raybench here.
# Such a gate never works, so it must not look green.
case ${FAIL_ON:-slower}:${EXIT_CODE:-0} in
  slower:2 | slower:4 | slower:12[67] | undecided:2 | undecided:4 | undecided:12[67])
    echo "::error title=raybench::the gate cannot run; the reason is in the summary of this job"
    exit 2
    ;;
esac

case ${FAIL_ON:-slower}:${VERDICT:-not_measured} in
  never:*) ;;
  slower:slower | undecided:slower)
    echo "::error title=raybench::slower; the report is in the summary of this job"
    exit 1
    ;;
  undecided:undecided | undecided:not_measured)
    echo "::error title=raybench::${VERDICT/_/ }; the report is in the summary of this job"
    exit 5
    ;;
  slower:undecided | slower:not_measured)
    echo "::warning title=raybench::${VERDICT/_/ }: this is no statement about the change"
    ;;
  slower:* | undecided:*) ;;
  *)
    echo "::error title=raybench::fail-on: must be slower, undecided or never, got $FAIL_ON"
    exit 2
    ;;
esac
