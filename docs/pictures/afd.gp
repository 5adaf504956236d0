# Attention and FFN processes between GPUs: decode steps by the time of their computations, and round trips over the floor.
set terminal svg size 1000,420 dynamic font "DejaVu Sans,12" background "#fbfcfd"
set border lc rgb "#57606a"
set tics nomirror
set grid ytics lc rgb "#d0d7de" lt 1
set multiplot
set origin 0,0
set size 0.5,1
set title "decode step over its computations alone, 1A1F"
set xlabel "microseconds of a computation (61 layers, 3 micro-batches)"
set xrange [40:210]
set xtics (50, 97, 200)
set yrange [0.9:2.8]
set key top right samplen 2
plot "performance.txt" index 3 using 1:6 with linespoints lw 1.5 dt 2 pt 6 ps 0.5 lc rgb "#57606a" title "NCCL", \
     "" index 3 using 1:2 with linespoints lw 2 pt 7 ps 0.5 lc rgb "#8250df" title "push\\_pull", \
     "" index 3 using 1:4 with linespoints lw 2 pt 7 ps 0.5 lc rgb "#1a7f37" title "streams", \
     "" index 3 using 1:5 with linespoints lw 1.5 dt 2 pt 6 ps 0.5 lc rgb "#1a7f37" title "graphs", \
     "" index 3 using 1:3 with linespoints lw 2 pt 7 ps 0.5 lc rgb "#0969da" title "hosts"
set origin 0.5,0
set title "round trip, p50 over the floor"
set xlabel "p50 over the floor's"
unset ylabel
set grid noytics xtics lc rgb "#d0d7de" lt 1
set xrange [0:2.4]
set xtics auto
set yrange [0.4:6.6]
set style fill solid 0.9 noborder
set key top right samplen 1.5
plot "performance.txt" index 4 using 2:1:(0):2:($1):($1+0.32):ytic(4) with boxxyerror lc rgb "#0969da" title "1A1F", \
     "" index 4 using 3:1:(0):3:($1-0.32):($1) with boxxyerror lc rgb "#8250df" title "2A2F"
