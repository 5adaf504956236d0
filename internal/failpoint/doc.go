// Package failpoint enables faults in the code, by name, to prove that the tests find
// them. Without the build tag failpoints, On is constantly false, and the compiler drops
// the code of the fault.
package failpoint
