package bench

// The picture of bench afd.

import (
	"bytes"
	"fmt"
	"image/color"
	"os"
	"slices"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// Colors that are readable on the ground of the picture, also next to a dark page.
var (
	ground  = color.RGBA{0xfb, 0xfc, 0xfd, 0xff}
	ink     = color.RGBA{0x24, 0x29, 0x2f, 0xff}
	palette = []color.RGBA{{0x57, 0x60, 0x6a, 0xff}, {0x09, 0x69, 0xda, 0xff}, {0x82, 0x50, 0xdf, 0xff}, {0xcf, 0x22, 0x2e, 0xff}, {0x1a, 0x7f, 0x37, 0xff}, {0xbf, 0x87, 0x00, 0xff}}
)

// curve is a named line of a plot.
type curve struct {
	name   string
	points plotter.XYs
}

// curves are the lines of a plot, in the order of their first points.
type curves []curve

// named returns the curve with a name. It adds the curve if there is none.
func (c *curves) named(name string) *curve {
	i := slices.IndexFunc(*c, func(x curve) bool { return x.name == name })
	if i < 0 {
		i = len(*c)
		*c = append(*c, curve{name: name})
	}
	return &(*c)[i]
}

// tripCurves returns the median times of round trips by the number of the report, and the names of the reports. Of
// several workers it takes the slowest.
func tripCurves(all []*afdReport) (lines curves, names []string) {
	for i, r := range all {
		names = append(names, fmt.Sprintf("%d x %d", r.Workers, r.Servers))
		for _, x := range r.Trips {
			name := afdName(x.From, x.Form)
			if x.Form == askFloor {
				name += " (" + r.Floor + ")"
			}
			c, at := lines.named(name), plotter.XY{X: float64(i), Y: x.P50}
			if last := len(c.points) - 1; last < 0 || c.points[last].X != at.X {
				c.points = append(c.points, at)
			} else {
				c.points[last].Y = max(c.points[last].Y, at.Y)
			}
		}
	}
	return lines, names
}

// stepCurves returns the times of decode steps over their computation alone, by the time of a computation in
// microseconds.
func stepCurves(all []*afdReport) (lines curves) {
	for _, r := range all {
		for _, x := range r.Steps {
			c := lines.named(fmt.Sprintf("%d x %d, %s", r.Workers, r.Servers, afdName(x.From, x.Form)))
			c.points = append(c.points, plotter.XY{X: x.Compute, Y: x.RatioP50})
		}
	}
	return lines
}

// newPlot draws curves. The values of y begin at least at 0.
func newPlot(title, x, y string, curves []curve) (*plot.Plot, error) {
	plot.DefaultFont.Variant = "Sans"
	p := plot.New()
	p.BackgroundColor = ground
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = title, x, y
	p.Title.TextStyle.Color = ink
	p.Title.Padding = vg.Points(8)
	grid := plotter.NewGrid()
	grid.Horizontal.Color = color.RGBA{0xd0, 0xd7, 0xde, 0xff}
	grid.Vertical.Color = color.Transparent
	p.Add(grid)
	for i, c := range curves {
		line, points, err := plotter.NewLinePoints(c.points)
		if err != nil {
			return nil, fmt.Errorf("plot of %s: %w", c.name, err)
		}
		line.Color, line.Width = palette[i%len(palette)], vg.Points(1.5)
		points.Color, points.Shape, points.Radius = line.Color, draw.CircleGlyph{}, vg.Points(2.5)
		p.Add(line, points)
		p.Legend.Add(c.name, line, points)
	}
	p.Y.Min = 0
	p.Y.Max *= 1.1
	p.Legend.Top = true
	p.Legend.Padding = vg.Points(2)
	return p, nil
}

// plotAFD writes the picture of the reports: a plot of round trips if there are several numbers of processes, and a plot
// of decode steps if there are several times of computation.
func plotAFD(file string, all []*afdReport, compute []time.Duration) error {
	var plots []*plot.Plot
	if len(all) > 1 {
		curves, names := tripCurves(all)
		p, err := newPlot("round trip over "+all[0].Van+", p50", "workers x servers", "microseconds", curves)
		if err != nil {
			return err
		}
		p.NominalX(names...)
		p.Legend.Left = true
		plots = append(plots, p)
	}
	if len(compute) > 1 && len(all[0].Steps) > 0 {
		p, err := newPlot("decode step over "+all[0].Van+", p50", "computation of a layer and micro-batch, microseconds", "times the computation alone", stepCurves(all))
		if err != nil {
			return err
		}
		plots = append(plots, p)
	}
	const width, height = 420, 320
	svg := vgsvg.New(vg.Points(float64(width*len(plots))), vg.Points(height))
	tiles := draw.Tiles{Rows: 1, Cols: len(plots)}
	for i, p := range plots {
		tile := tiles.At(draw.New(svg), i, 0)
		tile.FillPolygon(ground, []vg.Point{tile.Min, {X: tile.Max.X, Y: tile.Min.Y}, tile.Max, {X: tile.Min.X, Y: tile.Max.Y}})
		const margin = 10
		p.Draw(draw.Crop(tile, vg.Points(margin), -vg.Points(margin), vg.Points(margin), -vg.Points(margin)))
	}
	var text bytes.Buffer
	if _, err := svg.WriteTo(&text); err != nil {
		return err
	}
	// Not every viewer has the font.
	return os.WriteFile(file, bytes.ReplaceAll(text.Bytes(), []byte("Liberation Sans"), []byte("Liberation Sans,Verdana,sans-serif")), 0o666)
}
