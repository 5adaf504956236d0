// What happens in the child of a fork.
#ifndef FSERVER_FORK_H
#define FSERVER_FORK_H

// Set in the child of a fork, which Go's threads do not survive: nothing may call Go there.
extern int sf_forked;

// Sets sf_forked in children of forks, and closes there what they must not keep.
void fork_watch(void);

#endif
