// Command ut_scheduler is the scheduler of the unit tests: it starts and stops.
package main

import "github.com/stepaf/stepaf-go/tests/internal/prog"

func main() { prog.Main(prog.Program{Roles: []string{"scheduler"}}) }
