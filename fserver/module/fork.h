// The child of a fork.
#ifndef FSERVER_FORK_H
#define FSERVER_FORK_H

// sf_forked is set in the child of a fork. Go's threads do not exist there, so no code may call Go.
extern int sf_forked;

// Sets sf_forked in children of forks, and closes the node's descriptors there.
void fork_watch(void);

#endif
