#!/usr/bin/env bash
# The body of a batch job that goes on by itself: runs a command, passes the scheduler's signals to it, and
# requeues the job when it was asked to stop by SIGUSR1 (#SBATCH --signal=B:USR1@...) and the command says that
# it has saved and would go on (exit code 85). SIGTERM saves too, but a job that was cancelled stays cancelled.
#
#   run_and_requeue.sh COMMAND [WORDS...]
#
# The command must go on with its run when it is started again (--name NAME --resume latest).
set -u
requeue_code=85
asked=

# The shell runs a trap only while it waits; a command in the foreground would hold the signal back.
"$@" &
child=$!
trap 'asked=USR1; kill -s USR1 "$child" 2>/dev/null' USR1
trap 'asked=TERM; kill -s TERM "$child" 2>/dev/null' TERM

# A trap ends `wait` early, so wait until the command itself has ended.
while kill -0 "$child" 2>/dev/null; do
    wait "$child"
done
wait "$child"
code=$?

# 128 + 10: the signal came before the command could take note of it, so nothing was lost.
if [[ $asked == USR1 && ( $code -eq $requeue_code || $code -eq 138 ) ]]; then
    echo "requeue: job $SLURM_JOB_ID has saved and goes on where it was"
    # The requeue ends this script; were it faster at ending, the job would count as failed.
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit "$code"
