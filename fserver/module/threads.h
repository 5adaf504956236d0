// The threads of this library, and those of the program that call it.
#ifndef FSERVER_THREADS_H
#define FSERVER_THREADS_H

// threads_init restores the program's actions for signals whose handlers Go's runtime replaced without needing them.
void threads_init(void);

// threads_forked restores, in the child of a fork, the program's signal actions from before
// the library was loaded. It is async-signal-safe.
void threads_forked(void);

// threads_fill_standard opens /dev/null for each of the descriptors 0 to 2 that is closed. Otherwise
// a connection of the library would get the number, and the program's output would go to that connection.
void threads_fill_standard(void);

#endif
