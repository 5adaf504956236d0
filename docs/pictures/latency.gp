# Round trips of a push_pull: in host memory by size, and from GPU to GPU beside NCCL.
set terminal svg size 1000,420 dynamic font "DejaVu Sans,12" background "#fbfcfd"
set border lc rgb "#57606a"
set tics nomirror
set grid ytics lc rgb "#d0d7de" lt 1
set multiplot
set origin 0,0
set size 0.5,1
set title "host memory, one host, p50 of a round trip"
set logscale xy
set xlabel "bytes each way"
set ylabel "microseconds"
set xtics ("1 KiB" 1024, "16 KiB" 16384, "64 KiB" 65536, "1 MiB" 1048576, "16 MiB" 16777216)
set yrange [3:40000]
set key top left Left reverse samplen 2
plot "performance.txt" index 0 using 1:3 with linespoints lw 2 pt 7 ps 0.5 lc rgb "#8250df" title "ZeroMQ (STEPAF\\_DATA=zmq)", \
     "" index 0 using 1:5 with linespoints lw 1.5 dt 2 pt 6 ps 0.5 lc rgb "#8250df" title "bare libzmq", \
     "" index 0 using 1:4 with linespoints lw 1.5 dt 2 pt 6 ps 0.5 lc rgb "#57606a" title "raw TCP", \
     "" index 0 using 1:2 with linespoints lw 2 pt 7 ps 0.5 lc rgb "#0969da" title "shared memory"
set origin 0.5,0
set title "GPU to GPU, attention payload"
unset logscale
set xlabel "microseconds"
unset ylabel
unset key
set key at graph 0.97,0.93 right samplen 1.5
set grid noytics xtics lc rgb "#d0d7de" lt 1
set xrange [0:200]
set xtics auto
set yrange [0.4:6.6]
set style fill solid 0.9 noborder
plot "performance.txt" index 1 using 2:1:(0):2:($1-0.32):($1+0.32):ytic(4) with boxxyerror lc rgb "#0969da" title "p50", \
     "" index 1 using 3:1 with points pt 7 ps 0.6 lc rgb "#cf222e" title "p99"
