// Package failpoint plants faults that the tests must find. Without the build tag
// failpoints, On is false for every name, and the compiler leaves the fault out.
package failpoint
