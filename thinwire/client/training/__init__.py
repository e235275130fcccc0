"""The process that trains, as the service sees it: begun, waited for, ended when it hangs, and begun anew."""
