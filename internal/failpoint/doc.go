// Package failpoint plants faults in the code, by name, to prove that the tests detect them. Without the build tag
// failpoints, On is constantly false, and the compiler removes the code of the fault.
package failpoint
