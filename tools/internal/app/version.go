package app

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/stepaf/stepaf-go/tools/internal/exit"
	"github.com/stepaf/stepaf-go/van"
	"github.com/stepaf/stepaf-go/van/backend"
)

// version is set by the linker: -X .../tools/internal/app.version=v1.2.3
var version string

func versionCommand() *cli.Command {
	return &cli.Command{
		Name: "version", Usage: "print version, transports and backends of this build",
		Description: "    stepaf version",
		ArgsUsage:   " ", HideHelpCommand: true,
		Action: exit.WithoutArguments(func(c *cli.Context) error {
			_, err := fmt.Fprintf(c.App.Writer, "stepaf %s (%s, %s/%s)\ntransports: %s\nbackends: %s\n", versionText(), runtime.Version(),
				runtime.GOOS, runtime.GOARCH, strings.Join(van.Transports(), ", "), strings.Join(backend.Names(), ", "))
			return err
		}),
	}
}

// versionText returns the version given to the linker, or the version in the build information.
func versionText() string {
	if version != "" {
		return version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	v := info.Main.Version
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 12 && v == "(devel)" {
			return s.Value[:12]
		}
	}
	return strings.Trim(v, "()")
}
