// The threads of this library, and those of the program that call it.
#ifndef FSERVER_THREADS_H
#define FSERVER_THREADS_H

// threads_init gives back the signals that Go's runtime has taken and does not need.
void threads_init(void);

// threads_forked restores, in the child of a fork, what the program did on signals before
// the library was loaded. It is async-signal-safe.
void threads_forked(void);

// threads_fill_standard opens /dev/null under each of the numbers 0 to 2 that is closed. A
// connection of the library would get the number otherwise, and what the program prints would go there.
void threads_fill_standard(void);

#endif
