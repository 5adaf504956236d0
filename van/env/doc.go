// Package env is the only place that reads the environment. One table describes
// every variable; Load reads them all at once, checks them strictly and returns
// a typed Config that remembers where each value came from.
//
// Names, defaults and meanings are those of C++ StepMesh (ps-lite's DMLC_ and PS_ names,
// BytePS's, StepMesh's). Load is stricter: where C++ StepMesh reads "true" as 0 and "32x"
// as 32, it returns an *Error that names the variable, its value and the allowed values.
// docs/env.md is generated from the table, except its columns "Read by" and
// "Unlike the original".
package env
