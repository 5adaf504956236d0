// Command stepaf starts, measures and inspects clusters of StepAF.
package main

import (
	"os"

	"github.com/stepaf/stepaf-go/tools/internal/app"
)

func main() { os.Exit(app.Run(os.Args, os.Stdout, os.Stderr)) }
