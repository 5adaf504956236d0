package logx

// Attributes of a logger whose values may change.

import (
	"context"
	"log/slog"
)

// With is l.With for attributes whose values are slog.LogValuers that change. Handlers other than this package's
// resolve values once, in With; for those, With adds the attributes to each record.
func With(l *slog.Logger, attrs ...slog.Attr) *slog.Logger {
	h := l.Handler()
	if _, ours := h.(*handler); ours {
		return slog.New(h.WithAttrs(attrs))
	}
	return slog.New(&late{h, attrs})
}

// late adds attributes to each record.
type late struct {
	slog.Handler
	attrs []slog.Attr
}

// Handle implements slog.Handler. It resolves values of a message at once: a handler of the application may write the
// record after the message was reused.
func (h *late) Handle(ctx context.Context, r slog.Record) error {
	now := slog.NewRecord(r.Time, r.Level, r.Message, r.PC)
	r.Attrs(func(a slog.Attr) bool {
		now.AddAttrs(slog.Attr{Key: a.Key, Value: a.Value.Resolve()})
		return true
	})
	now.AddAttrs(h.attrs...)
	return h.Handler.Handle(ctx, now)
}

// WithAttrs implements slog.Handler.
func (h *late) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &late{h.Handler.WithAttrs(attrs), h.attrs}
}

// WithGroup implements slog.Handler.
func (h *late) WithGroup(name string) slog.Handler {
	if name == "" {
		return h
	}
	return &late{h.Handler.WithGroup(name), h.attrs}
}
